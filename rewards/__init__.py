"""Rewards: verification, reward functions, code tests, reward models, scoring."""
