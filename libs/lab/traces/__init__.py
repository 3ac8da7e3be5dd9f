"""Reading, recording, generating, cutting, scaling and describing request traces."""
