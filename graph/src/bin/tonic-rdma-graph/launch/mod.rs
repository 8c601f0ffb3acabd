//! The processes of the parts that the command starts on this machine.

mod child;

pub(crate) use child::{Children, end_with};
