"""Runs under the recorder and their graphs: with guards, symbolic sizes and symbolic numbers."""
