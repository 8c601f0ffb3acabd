//! The source of the workspace's packages as a model: modules, names, public items and imports.

mod imports;
mod package;
mod public;
mod resolve;
mod rings;
mod text;

pub(crate) use imports::{Import, imports};
pub(crate) use package::Package;
pub(crate) use public::{PublicItem, public_items};
pub(crate) use resolve::Target;
pub(crate) use rings::rings;
pub(crate) use text::{code, docs, macro_calls, string};
