//! What operations share in one round of looks: the lanes, which of them are taken, and the check of a message.

use super::call::Packed;
use super::program::Program;
use crate::error::{CollectiveError, Place};
use crate::lane::{LaneError, LaneFault, Lanes, Tag};

/// Called before each step, for tests of failures.
pub(crate) type Watch = Box<dyn FnMut(Place) + Send>;

/// Why an operation can't go on.
#[derive(Debug)]
pub(super) enum Fault {
    Lane(LaneError),
    Error(CollectiveError),
}

impl From<LaneError> for Fault {
    fn from(error: LaneError) -> Self {
        Self::Lane(error)
    }
}

impl Fault {
    pub(super) fn into_error(self, place: Place) -> CollectiveError {
        match self {
            Self::Error(error) => error,
            Self::Lane(LaneError { rank, cause: LaneFault::Lost(reason) }) => {
                CollectiveError::RankLost { rank, place, reason }
            }
            Self::Lane(LaneError { rank, cause: LaneFault::Violation(what) }) => {
                CollectiveError::Violation { rank, place, what }
            }
        }
    }
}

/// The lanes that an earlier operation still needs, in one round of looks. Lanes keep the order of operations.
#[derive(Debug, Default)]
pub(super) struct Busy {
    pub(super) sends: Vec<bool>,
    pub(super) receives: Vec<bool>,
}

impl Busy {
    pub(super) fn clear(&mut self) {
        self.sends.fill(false);
        self.receives.fill(false);
    }
}

/// What an operation needs from its engine to move on.
pub(super) struct Context<'a, L: Lanes> {
    pub(super) lanes: &'a mut L,
    pub(super) busy: &'a mut Busy,
    pub(super) ranks: usize,
    /// Where a short operation reduces.
    pub(super) sum: &'a mut Vec<u8>,
    pub(super) watch: Option<&'a mut Watch>,
}

impl<L: Lanes> Context<'_, L> {
    /// Says that this step comes next.
    pub(super) fn at(&mut self, tag: &Tag, step: u32, program: &Program) {
        if let Some(watch) = &mut self.watch {
            watch(Place { operation: tag.operation, step, steps: program.steps.len() as u32 });
        }
    }
}

/// Checks a message of rank `from` against the one that is due.
pub(super) fn check(
    from: usize,
    due: &Tag,
    tag: &Tag,
    length: usize,
    arrived: usize,
    step: u32,
    steps: u32,
) -> Result<(), Fault> {
    if tag.operation == due.operation && tag.call == due.call && arrived == length {
        return Ok(());
    }
    let mismatch = |theirs: String| {
        let ours = Packed(due.call).to_string().into();
        let operation = due.operation;
        Fault::Error(CollectiveError::Mismatch { rank: from, operation, theirs: theirs.into(), ours })
    };
    Err(if tag.operation != due.operation {
        mismatch(format!("{} as operation {}", Packed(tag.call), tag.operation))
    } else if tag.call != due.call {
        mismatch(Packed(tag.call).to_string())
    } else {
        let what = format!("its message has {arrived} bytes, and one of {length} bytes was due").into();
        let place = Place { operation: due.operation, step, steps };
        Fault::Error(CollectiveError::Violation { rank: from, place, what })
    })
}
