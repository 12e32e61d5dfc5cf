"""`forespeak bench` in parts: traffic (who asks when) -> a lane (an engine here, a server anywhere) -> records -> figures -> tables
and a page. `command` puts them together."""
