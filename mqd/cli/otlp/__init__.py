"""`mqd otel`: a broker's metrics for OpenTelemetry."""
