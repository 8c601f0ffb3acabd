//! The engine on simulated lanes.
