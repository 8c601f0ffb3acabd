//! The explanation as text.

use std::fmt;

use super::{Copies, ExplainedTensor, Explanation};

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tensors.is_empty() {
            return writeln!(f, "no tensor crosses");
        }
        for (index, tensor) in self.tensors.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            tensor.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for ExplainedTensor {
    /// Writes a line with the name, and a line for each fact.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.name)?;
        writeln!(f, "  producer   {}, part {}", self.producer, self.from)?;
        writeln!(f, "  consumers  {}, part {}", self.consumers.join(", "), self.to)?;
        match self.bytes {
            Some(bytes) => writeln!(f, "  shape      {}, {bytes} bytes", self.shape)?,
            None => writeln!(f, "  shape      {}", self.shape)?,
        }
        writeln!(f, "  placement  {}: {}", self.placement, self.why)?;
        if let Some(site) = &self.site {
            writeln!(f, "  site       {site}")?;
        }
        if let (Some(first), Some(later)) = (self.first_step, self.later_steps) {
            writeln!(f, "  copies     first step: {first}; later steps: {later}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { tensors: 0, .. } => f.write_str("nothing sent"),
            Self { tensors, copied, inline: 0 } => write!(f, "{copied} of {tensors} tensors copied"),
            Self { tensors, copied, inline } => {
                write!(f, "{copied} of {tensors} tensors copied, {inline} sent inline")
            }
        }
    }
}
