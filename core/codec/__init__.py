"""What bytes look like on the wire."""
