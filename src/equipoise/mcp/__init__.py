"""Runs for agents: read-only tools of the Model Context Protocol (extra ``mcp``)."""
