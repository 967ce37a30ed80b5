"""Reward functions: what they see, the built-in ones, and how one is found by name.

A reward function is a plug-in: an entry point of the group `riacho.rewards`. It sees a finished session and returns
numbers, or raises CannotScore; it never guesses.
"""
