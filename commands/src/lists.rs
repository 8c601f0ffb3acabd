//! Lists on the command line.

use crate::value_error::ValueError;

/// The values of a comma-separated list: at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List<T>(pub Vec<T>);

/// Parses the items of `text` between commas with `item`. A value may be there twice.
///
/// # Errors
///
/// Fails if the list or an item is empty, or with the error of `item`.
pub fn parse_list<T>(
    text: &str,
    item: impl Fn(&str) -> Result<T, ValueError>,
) -> Result<List<T>, ValueError> {
    if text.trim().is_empty() {
        return Err(ValueError::EmptyList);
    }
    let parse = |part: &str| match part.trim() {
        "" => Err(ValueError::EmptyItem),
        part => item(part),
    };
    text.split(',').map(parse).collect::<Result<_, _>>().map(List)
}

/// Parses a list in which no value is there twice.
///
/// # Errors
///
/// Fails as [`parse_list`] does, and if a value is there twice.
pub fn parse_set<T: PartialEq>(
    text: &str,
    item: impl Fn(&str) -> Result<T, ValueError>,
) -> Result<List<T>, ValueError> {
    let List(values) = parse_list(text, item)?;
    for (value, (index, given)) in values.iter().zip(text.split(',').enumerate()) {
        if values[..index].contains(value) {
            return Err(ValueError::Repeated(given.trim().to_owned()));
        }
    }
    Ok(List(values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::parse_number;

    #[test]
    fn lists_have_no_empty_and_no_repeated_items() {
        let number = |text: &str| parse_number("number", text, 1..=9);
        assert_eq!(parse_set("1, 2", number), Ok(List(vec![1, 2])));
        assert_eq!(parse_set("1,,2", number), Err(ValueError::EmptyItem));
        assert_eq!(parse_set("", number), Err(ValueError::EmptyList));
        assert_eq!(parse_set("3,1,3", number), Err(ValueError::Repeated("3".to_owned())));
        assert_eq!(parse_list("3,1,3", number), Ok(List(vec![3, 1, 3])));
        assert!(matches!(parse_list("10", number), Err(ValueError::Number { .. })));
    }
}
