"""Prediction of a run's memory and time on any GPU.

The recipe's own trainer runs two steps on fake tensors, and its allocations and kernels are
recorded (`trace`). From that trace follow memory on a given GPU (`memory`) and time (`speed`).
"""
