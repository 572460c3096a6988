"""A job's stored records through policies again, and rehearsals of its recovery."""
