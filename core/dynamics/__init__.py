"""Molecular dynamics and relaxation of atoms that stay on their ranks."""
