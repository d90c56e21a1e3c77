"""From a request to a plan: profiles found or made, policies searched, figures held against simulation."""
