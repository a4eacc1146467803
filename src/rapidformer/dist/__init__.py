"""Processes, devices and what they send each other."""
