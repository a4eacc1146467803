"""Processes, devices and communication."""
