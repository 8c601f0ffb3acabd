//! Which algorithm an operation takes.

use std::fmt;

use crate::plan::Algorithm;

/// Which plans the operations of a group follow. All ranks make the same choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanChoice {
    /// By the number of bytes, with limits that suit one host.
    #[default]
    Default,
    /// One algorithm for all lengths, in pieces of so many bytes.
    Fixed {
        /// The algorithm.
        algorithm: Algorithm,
        /// The largest message of a step in bytes.
        piece_bytes: usize,
    },
    /// A table: each line holds for operations of at most so many bytes, and the last one for all longer ones. In order.
    Table(Vec<(usize, Algorithm, usize)>),
}

/// The plans of a group, as a table: up to how many bytes, which algorithm, pieces of how many bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plans {
    lines: Vec<(usize, Algorithm, usize)>,
}

impl Plans {
    pub(crate) fn new(choice: &PlanChoice, ranks: usize) -> Self {
        let one_shot = if ranks == 2 { 16 << 10 } else { 4 << 10 };
        let lines = match choice {
            PlanChoice::Table(lines) if !lines.is_empty() => lines.clone(),
            PlanChoice::Fixed { algorithm, piece_bytes } => vec![(usize::MAX, *algorithm, *piece_bytes)],
            PlanChoice::Default | PlanChoice::Table(_) => vec![
                (one_shot, Algorithm::OneShot, one_shot),
                (256 << 10, Algorithm::HalvingDoubling, 128 << 10),
                (usize::MAX, Algorithm::Ring, 256 << 10),
            ],
        };
        Self { lines }
    }

    /// Returns the algorithm and the bytes of a piece.
    #[inline]
    pub(crate) fn choose(&self, bytes: usize) -> (Algorithm, usize) {
        let line = self.lines.iter().find(|(most, ..)| bytes <= *most).or(self.lines.last());
        line.map_or((Algorithm::Ring, 256 << 10), |(_, algorithm, piece)| (*algorithm, *piece))
    }
}

impl fmt::Display for Plans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (most, algorithm, piece)) in self.lines.iter().enumerate() {
            if at > 0 {
                f.write_str("; ")?;
            }
            if *most != usize::MAX {
                write!(f, "up to {most} bytes: ")?;
            }
            write!(f, "{algorithm:?} in pieces of {piece} bytes")?;
        }
        Ok(())
    }
}
