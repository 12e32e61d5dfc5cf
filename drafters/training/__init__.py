"""How drafters are made: the target writes answers, and heads or a student learn from what it scores at each of their tokens.

Knows token ids, tensors and files; refuses to know text, which the caller brings as a `Speaker`. `run.train` is the door.
"""
