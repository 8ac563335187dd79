"""The judge as a service over HTTP: workers by device, a bounded queue, a client."""
