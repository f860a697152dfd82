"""What a run is: schema, YAML layers, derived values."""
