//! The processes of the parts that the command starts on this machine.

mod child;

pub(crate) use child::{Children, LISTENING, end_with};
