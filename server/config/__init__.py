"""Configuration of the server: schema, loading, validation and rendering."""
