"""A run costs bytes by kind at named moments, seconds by phase, and bytes on the wire: all are measured here."""
