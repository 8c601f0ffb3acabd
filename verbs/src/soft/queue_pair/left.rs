//! What is left to do after a visit of a queue pair.

/// What a visit leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Left {
    /// Nothing.
    Nothing,
    /// The rest of a message, of which this visit has moved a part. It follows when the other end has gone on.
    Message,
    /// Work that the next visit can carry out.
    Work,
}

impl Left {
    /// Returns [`Message`](Self::Message) on the condition.
    #[inline]
    pub(super) fn message_if(condition: bool) -> Self {
        if condition { Self::Message } else { Self::Nothing }
    }

    /// Returns [`Work`](Self::Work) on the condition.
    #[inline]
    pub(super) fn work_if(condition: bool) -> Self {
        if condition { Self::Work } else { Self::Nothing }
    }
}
