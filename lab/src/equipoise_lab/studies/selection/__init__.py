"""Softmax and its alternatives at growing contexts, and Mudarisov's figures."""
