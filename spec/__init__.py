"""The speculative decoding algorithm and its state: token ids in, token ids out. Knows no text, sockets or drafters."""
