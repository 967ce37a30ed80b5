"""What one request goes through: sampling rules, leases and slots, capture, sessions, feedback."""
