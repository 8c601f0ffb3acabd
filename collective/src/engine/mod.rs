//! The engine: carries out plans over lanes.
