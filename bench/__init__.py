"""Workloads and measurements. Not part of the library; nothing in disagg imports it."""
