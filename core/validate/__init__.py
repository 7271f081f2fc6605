"""Checks that a model over ranks gives what it gives in one process."""
