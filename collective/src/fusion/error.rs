//! Errors of the fusion of gradients.

use std::fmt;
use std::sync::Arc;

use crate::error::CollectiveError;

/// An error of a [`Fusion`](super::Fusion), or of one of its steps.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FusionError {
    /// A gradient has a name that the first step did not have.
    #[error(
        "gradient `{name}` was not part of the first step, so it has no place in a bucket; give the same gradients in \
         every step, or build a new fusion"
    )]
    Unknown {
        /// The name of the gradient.
        name: Arc<str>,
    },
    /// A step ends without some of its gradients.
    #[error("the step ends without {0}; give all gradients of the first step in every step")]
    Missing(Names),
    /// A gradient has another length than before.
    #[error("gradient `{name}` has {given} elements, and had {expected} before; its length may not change")]
    Length {
        /// The name of the gradient.
        name: Arc<str>,
        /// The number of elements of this call.
        given: usize,
        /// The number of elements of an earlier call.
        expected: usize,
    },
    /// A gradient was given twice in one step.
    #[error("gradient `{name}` was given twice in one step; add its parts up first")]
    Twice {
        /// The name of the gradient.
        name: Arc<str>,
    },
    /// The gradients of the first step differ between the ranks. All ranks get this error, and may begin the first step anew.
    #[error("{0}; all ranks must give the same gradients in the first step")]
    Ranks(Arc<str>),
    /// An earlier step began to reduce gradients and was not driven to its end.
    #[error(
        "an earlier step of this fusion began to reduce and did not end, so the ranks are out of step; end each step \
         by `finish`, and build a new fusion after an error"
    )]
    Unfinished,
    /// A collective operation failed, or memory could not be had.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

/// Fails if a gradient was not given, and names all of these.
pub(super) fn complete<'a>(
    gradients: impl Iterator<Item = (&'a Arc<str>, &'a bool)>,
) -> Result<(), FusionError> {
    let missing: Arc<[Arc<str>]> =
        gradients.filter(|(_, given)| !**given).map(|(name, _)| Arc::clone(name)).collect();
    if missing.is_empty() { Ok(()) } else { Err(FusionError::Missing(Names(missing))) }
}

/// Names of gradients. Displays the first few, and the number of the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(pub(super) Arc<[Arc<str>]>);

impl Names {
    /// Returns the names, in the order of the buckets.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|name| &**name)
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 5;
        f.write_str(if self.0.len() == 1 { "gradient " } else { "gradients " })?;
        for (at, name) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}`{name}`", if at == 0 { "" } else { ", " })?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
