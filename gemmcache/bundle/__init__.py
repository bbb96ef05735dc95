"""The versioned artifact: manifest, reader, writer."""
