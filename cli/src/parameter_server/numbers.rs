//! Whole numbers on the command line.

use tonic_rdma_commands::ValueError;

/// Parses a whole number from 1 to `most`.
pub(crate) fn within(text: &str, kind: &'static str, most: usize) -> Result<usize, ValueError> {
    match text.parse() {
        Ok(number) if (1..=most).contains(&number) && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            Ok(number)
        }
        _ => Err(ValueError::number(kind, text, format!("whole numbers from 1 to {most}"))),
    }
}
