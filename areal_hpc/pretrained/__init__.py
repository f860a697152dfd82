"""What a Hugging Face checkpoint directory says of its model, and its weights."""
