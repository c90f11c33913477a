"""What changes between a source's elements and what lies in a destination."""
