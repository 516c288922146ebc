/* Intrusive doubly linked list: the node is embedded in its owner, so nothing is allocated. A node
 * that is in no list points to itself. */
#ifndef MQD_LIST_H
#define MQD_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct mqd_node {
    struct mqd_node *next, *previous;
};

static inline void mqd_list_init(struct mqd_node *node)
{
    node->next = node->previous = node;
}
static inline bool mqd_list_empty(const struct mqd_node *head)
{
    return head->next == head;
}
static inline bool mqd_list_linked(const struct mqd_node *node)
{
    return node->next != node;
}

static inline void mqd_list_append(struct mqd_node *head, struct mqd_node *node)
{
    node->previous = head->previous;
    node->next = head;
    head->previous->next = node;
    head->previous = node;
}

static inline void mqd_list_remove(struct mqd_node *node)
{
    node->previous->next = node->next;
    node->next->previous = node->previous;
    mqd_list_init(node);
}

/* Removes and returns the first node; NULL when empty. */
static inline struct mqd_node *mqd_list_pop(struct mqd_node *head)
{
    struct mqd_node *first = head->next;
    if (first == head)
        return NULL;
    mqd_list_remove(first);
    return first;
}

/* Moves all nodes of `from` to the end of `to`. */
static inline void mqd_list_move_all(struct mqd_node *to, struct mqd_node *from)
{
    if (mqd_list_empty(from))
        return;
    from->next->previous = to->previous;
    to->previous->next = from->next;
    from->previous->next = to;
    to->previous = from->previous;
    mqd_list_init(from);
}

#define MQD_CONTAINER(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))
/* `following` is the node after `node`, which may be removed in the body. */
#define MQD_LIST_EACH(node, following, head)                                                                           \
    for (struct mqd_node *node = (head)->next, *following = node->next; node != (head);                                \
         node = following, following = node->next)

#endif
