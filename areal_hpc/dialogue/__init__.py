"""Messages to tokens and back."""
