"""Clients that people have, unmodified, against a suite: does each get its answers?"""
