"""Does the code of a user mix records, write to the model, or depend on neighbours?"""
