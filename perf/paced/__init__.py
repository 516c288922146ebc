"""Cases in an open loop."""
