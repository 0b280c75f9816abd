"""Policies decide what becomes of closed turns: a snapshot in, decisions out; they look and never free."""
