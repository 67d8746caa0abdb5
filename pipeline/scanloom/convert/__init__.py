"""Models by name, and conversion of foreign model formats into cards; torch is allowed here."""
