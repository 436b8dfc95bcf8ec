"""What a step reads and changes: found in arguments, closures, globals and objects, and swapped."""
