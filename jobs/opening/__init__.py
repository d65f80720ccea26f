"""Opens jobs: reads and checks what a job asks for, before any work starts."""
