//! The payloads: content that can be checked, and the reduction that receivers compute over it.

pub(crate) mod consume;
pub(crate) mod content;
pub(crate) mod reduce;
