"""``terapipe doctor``: whether a machine, or several hosts together, can train, and what to do if not.

examination    gathers facts: versions, kernels, cores, memory of every rank; whether ranks meet; their links
diagnosis      judges facts, without torch: findings with remedies
proof          --prove: runs checks in processes of their own and writes what they tell
exactness      checks of numbers: kernels, products, orders, autocast, checkpoints, a killed rank
measurements   checks of bytes, seconds, waits and links
"""
