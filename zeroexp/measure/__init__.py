"""What a run cost: bytes by kind at named moments, seconds by phase, bytes on the wire."""
