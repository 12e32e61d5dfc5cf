"""`forespeak tune`: a workload's drafts are recorded once (`record`), costs are measured (`measure`), and every setting is predicted
from both on a simulated clock (`predict`, `search`)."""
