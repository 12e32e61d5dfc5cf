"""How much memory a model takes, from its config alone: `facts` reads what kind of model it is, `memory` does the arithmetic."""
