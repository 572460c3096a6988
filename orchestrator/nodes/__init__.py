"""The nodes that jobs hold, on Ray and as people see them."""
