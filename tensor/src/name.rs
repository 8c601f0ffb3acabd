//! Names of regions, slots and tensors.

use std::sync::Arc;

use crate::error::ChannelError;
use crate::wire::tensor_frame::MAX_NAME;

/// Returns `name` if its length is allowed.
pub(crate) fn check_name(name: &str) -> Result<Arc<str>, ChannelError> {
    match (1..=MAX_NAME).contains(&name.len()) {
        true => Ok(name.into()),
        false => Err(ChannelError::BadName(name.len())),
    }
}
