//! Lists on the command line.

use std::ops::RangeInclusive;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::failure::ValueError;
use crate::named::parse_name;
use crate::units::number;

/// The values of a comma-separated list: at least one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
        return Err(ValueError("the list is empty".to_owned()));
    }
    let parse = |part: &str| match part.trim() {
        "" => Err(ValueError("an item of the list is empty".to_owned())),
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
            return Err(ValueError(format!("{:?} is there twice", given.trim())));
        }
    }
    Ok(List(values))
}

/// Returns the parser of a list of whole numbers within `accepted`, each once. `kind` names one of them in an
/// error.
pub fn number_list<T: TryFrom<u64> + PartialEq>(
    kind: &'static str,
    accepted: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<List<T>, ValueError> + Clone {
    let item = number(kind, accepted);
    move |text| parse_set(text, &item)
}

/// Returns the parser of a list of choices, each once. `kind` names one of them in an error.
pub fn name_list<T: ValueEnum + PartialEq>(
    kind: &'static str,
) -> impl Fn(&str) -> Result<List<T>, ValueError> + Clone {
    move |text| parse_set(text, |item| parse_name(kind, item))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_no_empty_and_no_repeated_items() {
        let number = number::<u8>("number", 1..=9);
        assert_eq!(parse_set("1, 2", &number), Ok(List(vec![1, 2])));
        let refused =
            |list: Result<List<u8>, ValueError>| list.map_err(|error| error.to_string()).unwrap_err();
        assert_eq!(refused(parse_set("1,,2", &number)), "an item of the list is empty");
        assert_eq!(refused(parse_set("", &number)), "the list is empty");
        assert_eq!(refused(number_list::<u8>("number", 1..=9)("3,1,3")), "\"3\" is there twice");
        assert_eq!(parse_list("3,1,3", &number), Ok(List(vec![3, 1, 3])));
        assert!(refused(parse_list("10", &number)).starts_with("bad number \"10\""));
    }
}
