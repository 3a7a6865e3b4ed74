"""What will be compiled, and what was; nothing here is needed to train."""
